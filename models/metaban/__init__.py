"""Meta-Ban as published (`paper`) and as its authors' code runs it (`pooled`)."""
