"""tinylm: the small byte-level language model that this project trains and ships."""
