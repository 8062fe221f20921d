"""Shows runs in a browser: views as pure functions, a Dash app, a report that needs no server.

Order of the files, each calling only those before it: `units`, `theme`, `content` (what a page is
made of), `state` (what a URL says), `catalog` and `data` (what a run directory holds), `views/`
(one file a page), `components` and `app` (Dash), `report` (one HTML file). Importing this package
imports neither torch nor dash.
"""
