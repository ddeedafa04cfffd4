"""The rules: the policy as typed data, read from its file and refused where it cannot work. Knows no other room."""
