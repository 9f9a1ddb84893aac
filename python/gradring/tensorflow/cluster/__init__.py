"""The task of this process, parameter servers, and the placement of variables on them."""
