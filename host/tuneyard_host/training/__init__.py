"""Training: what a job computes, from trajectories or examples to an adapter."""
