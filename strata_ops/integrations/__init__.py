"""strata_ops inside other people's libraries, one module a library. Importing this package imports none of them."""
