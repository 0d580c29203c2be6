"""One probe for each upstream defect of the catalog."""
