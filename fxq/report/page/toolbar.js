/* The buttons above the graph, and the legend below it. */

/** Buttons above the graph. */
function makeToolbar(host, does) {
  const modes = Object.entries(MODES).map(([mode, title]) =>
    el("button", { "data-mode": mode, title: `${title} (${mode[0]})`, onclick: () => go({ mode }) }, title),
  );
  const depth = el("select", {
    id: "depth",
    "aria-label": "Expand to depth",
    onchange: () => does.depth(depth.value === "all" ? Infinity : Number(depth.value)),
  });
  const changes = el("span.changes", { id: "changes" });
  host.append(
    el("div.buttons", { role: "group", "aria-label": "What is shown" }, ...modes),
    changes,
    el("span.space"),
    el(
      "div.buttons",
      { role: "group", "aria-label": "Groups" },
      signButton("Collapse all groups (c)", "⊟", "collapse-all", () => does.depth(0)),
      signButton("Expand all groups (e)", "⊞", "expand-all", () => does.depth(Infinity)),
      depth,
    ),
    el(
      "div.buttons",
      { role: "group", "aria-label": "Zoom" },
      signButton("Zoom out (−)", "−", "zoom-out", () => does.zoom(1 / 1.3)),
      signButton("Fit the whole graph (f)", "Fit", "fit", does.fit),
      signButton("Zoom in (+)", "+", "zoom-in", () => does.zoom(1.3)),
    ),
  );
  return {
    /** @param {Scene} scene */
    show(scene) {
      for (const choice of modes) choice.setAttribute("aria-pressed", String(choice.dataset.mode === chosenMode()));
      const diff = scene.diff;
      changes.replaceChildren(
        ...(diff
          ? Object.entries(diff.counts)
              .filter(([, n]) => n)
              .map(([mark, n]) => chip(data.changes[mark], `${data.changes[mark].tag} ${n}`))
          : []),
      );
      if (diff && !changes.childElementCount) changes.textContent = "no difference";
      depth.replaceChildren(
        ...d3.range(scene.depth + 1).map((n) => el("option", { value: n }, `depth ${n}`)),
        el("option", { value: "all" }, "all"),
      );
      depth.value = opened.depth >= scene.depth ? "all" : String(opened.depth);
      depth.parentElement.hidden = scene.depth === 0;
    },
  };
}

const PEN_MEANINGS = { added: "new edge", removed: "edge gone", became: "became" };

/** What the colours mean, of those that are there. @param {Scene} scene */
function showLegend(host, scene) {
  const kinds = Object.entries(data.looks).filter(([kind]) => scene.root.kinds.get(kind));
  const entries = kinds.map(([, look]) => el("span.entry", chip(look), look.meaning));
  if (scene.id.startsWith("diff"))
    for (const [pen, text] of Object.entries(PEN_MEANINGS)) entries.push(el("span.entry", el(`i.pen.${pen}`), text));
  host.replaceChildren(...entries);
}
