"""Images that a tower reads as a grid of tiles."""
