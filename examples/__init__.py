"""Examples. Each runs on a laptop with a tiny model, and with a real one by flags; its README says how."""
