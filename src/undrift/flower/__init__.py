"""Real federations: an experiment file runs on Flower, which provides transport, TLS, authentication and scheduling."""
