#!/bin/sh
# What the Lambda Web Adapter starts where answers stream: the same application that app.handler wraps where they do not.
export PYTHONPATH="/opt/python:$PYTHONPATH"
exec python -m uvicorn --app-dir "$LAMBDA_TASK_ROOT" --port "$AWS_LWA_PORT" --lifespan off --no-access-log app:app
