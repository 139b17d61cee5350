"""HTTP below the routes: what the server and the gateway share. It knows no model and no upstream."""
