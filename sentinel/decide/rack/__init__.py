"""The rack: where everything stands, who said so, and what contradicts what. Knows no other room."""
