/* The keys, and the list of them (?). */

const KEYS = [
  ["↓ → / ↑ ←", "next / previous pass"],
  ["g  d  s", "graph, diff with the pass before, both side by side"],
  ["n / p", "next / previous rewrite of the pass"],
  ["j / k", "next / previous node"],
  ["f", "fit the whole graph"],
  ["+ / −", "zoom; or the wheel; drag to move"],
  ["e / c", "expand / collapse all groups; double click opens one"],
  ["1 … 9", "expand to that depth"],
  ["/", "search"],
  ["t", "light or dark"],
  ["Esc", "close, choose nothing"],
  ["?", "this list"],
];

/** @returns {{toggle(): void}} */
function makeHelp() {
  const dialog = el(
    "dialog",
    { id: "help", "aria-label": "Keys" },
    el("h2", "Keys"),
    el("table", ...KEYS.map(([keys, what]) => el("tr", el("td", el("kbd", keys)), el("td", what)))),
    el("form", { method: "dialog" }, el("button", { type: "submit" }, "Close")),
  );
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
  document.body.append(dialog);
  return { toggle: () => (dialog.open ? dialog.close() : dialog.showModal()) };
}

/** Call `actions[key]` for a key that is pressed outside of text fields, while `when()`. */
function onKeys(actions, when) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !when()) return;
    const target = /** @type {any} */ (event.target);
    if (target.closest?.("input, textarea, select, dialog[open]")) return;
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action(event);
  });
}

/** The keys of the Graph tab, while it is shown. */
function graphKeys({ visible, setDepth, isHere }) {
  const step = (way) => () => {
    const i = Math.max(0, Math.min(passes.length - 1, chosenPass() + way));
    go({ pass: passId(i), rw: "" });
  };
  const walk = (way) => () => {
    const names = graphOf(chosenPass()).drawn.map((node) => node.name);
    const at = names.indexOf(state.node);
    go({ node: names[at < 0 ? 0 : Math.max(0, Math.min(names.length - 1, at + way))], rw: "" });
  };
  const mode = (name) => () => go({ mode: name });
  const actions = {
    ArrowDown: step(1),
    ArrowRight: step(1),
    ArrowUp: step(-1),
    ArrowLeft: step(-1),
    g: mode("graph"),
    d: mode("diff"),
    s: mode("side"),
    n: () => stepRewrite(1),
    p: () => stepRewrite(-1),
    j: walk(1),
    k: walk(-1),
    f: () => visible().forEach((pane) => pane.fit()),
    "+": () => visible().forEach((pane) => pane.zoomBy(1.3)),
    "=": () => visible().forEach((pane) => pane.zoomBy(1.3)),
    "-": () => visible().forEach((pane) => pane.zoomBy(1 / 1.3)),
    e: () => setDepth(Infinity),
    c: () => setDepth(0),
    Escape: () => go({ node: "", rw: "" }),
  };
  for (let depth = 1; depth <= 9; depth++) actions[depth] = () => setDepth(depth);
  onKeys(actions, isHere);
}
