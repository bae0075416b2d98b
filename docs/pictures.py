"""Pictures of the built pages in a wide and a narrow window, and checks of what is in them.

``make docs-pictures`` writes docs/_build/pictures/PAGE-WIDTH.png. It fails if a page has a box that
is cut off or a file from another host. It needs Chromium, and one to two seconds for each picture.
"""

import argparse
import contextlib
import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from tqdm import tqdm

BUILD = Path(__file__).parent / "_build"
WIDTHS = (1280, 390)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TALLEST = 16_000  # in pixels, of a picture
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

# Loads each page into a frame of the given width, and lists its faults. What a parent scrolls is
# not cut off; the sizes are those that the browser laid out.
PROBE = """<!doctype html><pre id=found></pre><script>
const pages = PAGES, width = WIDTH;
const name = e => e.tagName.toLowerCase() + [...e.classList].map(c => '.' + c).join('');
function faults(page, view) {
  const found = [], scrolls = e => ['auto', 'scroll'].includes(view.getComputedStyle(e).overflowX);
  const inside = e => e.getBoundingClientRect().right <= view.innerWidth + 1;
  for (const e of page.querySelectorAll('article *')) {
    const box = e.getBoundingClientRect();
    if (box.width === 0) continue;
    let parent = e;
    if (!inside(e)) {
      while ((parent = parent.parentElement) && !(scrolls(parent) && inside(parent)));
      if (!parent) found.push(`${name(e)} ends at ${Math.round(box.right)} px`);
    }
    if (view.getComputedStyle(e).overflowX === 'hidden' && e.clientWidth > 1 &&
        e.scrollWidth > e.clientWidth + 1) found.push(`${name(e)} hides what is in it`);
  }
  const wide = page.documentElement.scrollWidth;
  if (wide > view.innerWidth) found.push(`the page is ${wide} px wide`);
  for (const e of page.querySelectorAll('script[src], link[rel=stylesheet], img[src]')) {
    const from = e.src || e.href;
    if (!from.startsWith(location.origin) && !from.startsWith('data:')) found.push(from);
  }
  return found;
}
(async () => {
  const result = {};
  for (const page of pages) {
    const frame = document.createElement('iframe');
    frame.style = `border: 0; height: 800px; width: ${width}px`;
    frame.src = '/' + page;
    document.body.append(frame);
    await new Promise(done => frame.onload = done);
    const inner = frame.contentDocument;
    result[page] = {height: inner.documentElement.scrollHeight,
                    faults: faults(inner, frame.contentWindow)};
    frame.remove();
  }
  document.getElementById('found').textContent = JSON.stringify(result);
})();
</script>"""


def browser():
    """Return the path of a browser, or end with a message that says which ones are looked for."""
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    sys.exit(
        f"docs-pictures: no browser: want {', '.join(BROWSERS[:-1])} or {BROWSERS[-1]} on the path"
        " (on Debian: apt-get install chromium)"
    )


def pages(root):
    """Return the pages below a folder, but not those of source code."""
    found = (path.relative_to(root) for path in root.rglob("*.html"))
    return sorted(p.as_posix() for p in found if p.parts[0] not in {"_modules", "_static"})


@contextlib.contextmanager
def served(root, width):
    """Serve a folder of pages and the probe of them; yield its address."""
    names = pages(root)
    probe = PROBE.replace("PAGES", json.dumps(names)).replace("WIDTH", str(width)).encode()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            if self.path != "/probe":
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            return self.wfile.write(probe)

    handler = functools.partial(Handler, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def run(program, *options):
    """Run the browser with a profile of its own, and return what it prints."""
    with tempfile.TemporaryDirectory() as profile:
        command = [program, *FLAGS, f"--user-data-dir={profile}", *options]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)


def measured(program, address):
    """Return {page: {"height": pixels, "faults": [text]}}."""
    printed = run(program, "--virtual-time-budget=250000", "--dump-dom", f"{address}/probe").stdout
    found = re.search(r'<pre id="found">(.+?)</pre>', printed, re.DOTALL)
    if found is None:
        sys.exit("docs-pictures: the browser did not finish measuring the pages")
    return json.loads(html.unescape(found[1]))


def main(argv):
    """Write a picture of each page and width; return 1 if a page has a fault."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--pages", type=Path, default=BUILD / "html", help="folder of the pages")
    parser.add_argument("--out", type=Path, default=BUILD / "pictures", help="folder of pictures")
    options = parser.parse_args(argv)
    program, failed = browser(), False
    if not pages(options.pages):
        sys.exit(f"docs-pictures: no pages in {options.pages}: make docs builds them")
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    for width in WIDTHS:
        with served(options.pages, width) as address:
            found_in = measured(program, address).items()
            for page, found in tqdm(found_in, desc=f"{width} px", unit="page"):
                for fault in found["faults"]:
                    failed = True
                    print(f"{page} at {width} px: {fault}")
                name = page.removesuffix(".html").replace("/", "-")
                size = f"--window-size={width},{min(found['height'], TALLEST)}"
                picture = options.out / f"{name}-{width}.png"
                run(program, size, f"--screenshot={picture}", f"{address}/{page}")
    print(f"{len([*options.out.iterdir()])} pictures in {options.out}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
