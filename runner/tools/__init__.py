"""Tools: what the model may call, and the pipeline every call passes."""
