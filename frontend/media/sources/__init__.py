"""Where images and audio come from: data URLs, downloads and local files."""
