"""Sources of images and audio: data URLs, downloads and local files."""
