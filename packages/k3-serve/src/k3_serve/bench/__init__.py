"""`k3 bench serve`: seeded load on a server of the OpenAI API, measured from outside by HTTP."""
