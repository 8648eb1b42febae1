/* The passes in order, on the left: time, edits, nodes, and of which kinds; SQNR where it was measured. */

/** The list of passes. @param {HTMLElement} host */
function makeTimeline(host) {
  const list = el("ol.passes", { id: "timeline", "aria-label": "Passes" });
  const most = Math.max(...passes.map((_, i) => graphOf(i).drawn.length));
  let stage = "";
  const buttons = passes.map((pass, i) => {
    const heading = pass.stage && pass.stage !== stage ? el("li.stage", { "aria-hidden": "true" }, pass.stage) : null;
    stage = pass.stage ?? stage;
    const about = { "data-pass": passId(i), onclick: () => go({ pass: passId(i), rw: "" }) };
    const button = el("button.pass", about, ...passLines(pass, i, most));
    if (heading) list.append(heading);
    list.append(el("li", button));
    return button;
  });
  host.append(el("h2", isPair ? "Graphs" : "Passes"), list);
  const show = () => {
    const chosen = chosenPass();
    for (const [i, button] of buttons.entries()) {
      if (i === chosen) button.setAttribute("aria-current", "step");
      else button.removeAttribute("aria-current");
    }
    buttons[chosen]?.scrollIntoView({ block: "nearest" });
  };
  return { show };
}

function passLines(pass, i, most) {
  const nodes = graphOf(i).drawn;
  const sqnr =
    typeof pass.sqnr === "number"
      ? el("span.sqnr", { title: "SQNR against the float model on the example input" }, `${pass.sqnr.toFixed(1)} dB`)
      : null;
  const edits = pass.rewrites.length;
  const bar = kindsBar(kindsOf(nodes), "span.kinds");
  bar.title = countsOf(kindsOf(nodes));
  bar.style.width = `${Math.max(4, (100 * nodes.length) / most)}%`;
  const facts = [`${nodes.length} nodes`, ...(isPair ? [] : [`${edits} edit${edits === 1 ? "" : "s"}`, duration(1000 * pass.ms)])];
  return [el("span.name", el("b", pass.name), sqnr), el("span.facts", facts.join(" · ")), bar];
}

/** A bar with a part for each kind of node, as long as its share. @param {Map<string, number>} amounts of each kind
 * @param {string} tag of the bar @param {(kind: string) => any} about  title and text of a part */
function kindsBar(amounts, tag, about = () => ({})) {
  const bar = el(tag);
  for (const kind in data.looks) {
    if (!amounts.get(kind)) continue;
    const part = el("span", { title: about(kind).title }, about(kind).text);
    Object.assign(part.style, { flexGrow: String(amounts.get(kind)), background: data.looks[kind].colour, color: data.looks[kind].ink });
    bar.append(part);
  }
  return bar;
}
