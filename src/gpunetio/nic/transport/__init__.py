"""The transport of IBTA chapter 9: requester, responder, and what carries their packets."""
