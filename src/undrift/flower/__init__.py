"""Real federations: an experiment file runs on Flower, which brings transport, TLS, authentication and scheduling."""
