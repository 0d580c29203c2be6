"""The catalog of upstream defects, and the doctor that looks for them."""
