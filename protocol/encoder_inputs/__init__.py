"""The images, audio clips and texts of a request that an encoder reads, and the data that workers decode."""
