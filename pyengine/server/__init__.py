"""An OpenAI-compatible HTTP server around `AsyncEngine`: `app.create_app` and `lifetime.serve`."""
