"""Read how a checkpoint turns texts and images into vectors, classes and scores."""
