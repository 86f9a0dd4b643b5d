"""The embedded base model `tuneyard/tiny`: the files in `model/` and the scripts that make them."""
