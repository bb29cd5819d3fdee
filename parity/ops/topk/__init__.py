"""The operation topk: the slots of the k largest scores of each row."""
