"""The HTTP server: sample, score, train and swap without leaving it. `groupwise.server.app` is where to begin."""
