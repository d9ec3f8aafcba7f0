// A page that `hookline report --live` writes again every few seconds: it loads itself anew, and the address keeps what was chosen.

const seconds = Number(document.documentElement.dataset.live ?? 0);

/** Load the page again, but not while it is out of sight or the reader types. */
function reloadSoon() {
  setTimeout(() => {
    if (document.hidden || document.activeElement?.matches("input, select")) return reloadSoon();
    writeUrl();
    location.reload();
  }, 1000 * seconds);
}
