"""A process that receives new weights from a trainer through torch.distributed."""
