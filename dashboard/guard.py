"""Who may talk to the server: this machine, or whoever knows the token."""

from __future__ import annotations

import hmac
import ipaddress

from flask import Flask, Response, request

COOKIE = "odc_token"
HEADER = "X-ODC-Token"

# Everything the pages load comes from this server; plotly draws with inline styles and data URLs.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "worker-src 'self' blob:; connect-src 'self'; object-src 'none'; base-uri 'self'; "
    "form-action 'none'; frame-ancestors 'self'"
)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host name or address."""
    name = host.strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def check_host(host: str, token: str | None) -> None:
    """Refuse to serve the network without a token.

    Raises:
        ValueError: If the host is not this machine and there is no token.
    """
    if not is_loopback(host) and not token:
        raise ValueError(
            f"host must be a loopback address (127.0.0.1, ::1, localhost) unless a token is given, "
            f"got {host!r}; pass token=... and open the address it prints"
        )


def guard(server: Flask, token: str | None) -> None:
    """Check every request of a Flask server.

    With a token, a request must carry it as `?token=`, in a cookie (set by the first) or in the
    header `X-ODC-Token`. Without one, the server is local, and only local names are answered: a
    page of another site cannot reach it under a name of its own.
    """

    @server.before_request
    def check() -> Response | None:
        if token is None:
            if is_loopback(request.host.rsplit(":", 1)[0]):
                return None
            return Response("This server answers on localhost only.", 403, mimetype="text/plain")
        given = (
            request.args.get("token"),
            request.cookies.get(COOKIE),
            request.headers.get(HEADER),
        )
        if any(_same(text, token) for text in given if text):
            return None
        text = "A token is needed: open the address that was printed at the start."
        return Response(text, 401, mimetype="text/plain")

    @server.after_request
    def harden(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = _POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        if token is not None and _same(request.args.get("token", ""), token):
            response.set_cookie(COOKIE, token, httponly=True, samesite="Strict")
        return response


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())
