"""What there is to serve with: sessions and their worth, the budget of doubt, the pace of moves, spares and shortage."""
