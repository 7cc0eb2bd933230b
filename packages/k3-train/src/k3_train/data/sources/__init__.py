"""Sources of documents, one file a family; each is an implementation of kind `dataset`."""
