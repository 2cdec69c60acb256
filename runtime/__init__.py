"""How two models write a text: the loop, and the face that users see. No torch, no runtime by name."""
