/* The Graph tab: timeline and rewrites, the graph or two, the node's panel; and how they follow the state. */

const MODES = { graph: "Graph", diff: "Diff", side: "Side by side" };

/** What is shown: graph, diff or side; the first pass has nothing to differ from. */
const chosenMode = () => (Object.hasOwn(MODES, state.mode ?? "") ? state.mode : isPair ? "side" : "graph");

function renderGraph(host) {
  const left = el("aside.left");
  const toolbar = el("div.toolbar");
  const sides = { before: el("div.pane", { "data-side": "before", hidden: true }), after: el("div.pane", { "data-side": "after" }) };
  const legend = el("div.kindlegend", { "aria-label": "Legend" });
  const side = el("aside.panel", { id: "panel", "aria-label": "Node" });
  host.classList.add("graphtab");
  host.append(left, el("div.center", toolbar, el("div.panes", sides.before, sides.after), legend), side);

  const timeline = makeTimeline(left.appendChild(el("section.passlist")));
  const rewrites = makeRewrites(left.appendChild(el("section.rewritelist")));
  const panel = makePanel(side);
  let linking = false;
  const does = {
    choose: (name) => go({ node: name, rw: "" }),
    toggle: (group) => toggleGroup(group),
    moved: (pane) => {
      if (linking || !isSplit()) return;
      linking = true; // the other pane says that it moved, too
      (pane === panes.after ? panes.before : panes.after).follow(pane);
      linking = false;
    },
  };
  const panes = { before: makePane(sides.before, "Graph before", does), after: makePane(sides.after, "Graph", does) };
  for (const [name, pane] of Object.entries(panes)) pane.caption = sides[name].appendChild(el("div.panecaption"));
  const isSplit = () => chosenMode() === "side" && chosenPass() > 0;
  const visible = () => (isSplit() ? [panes.before, panes.after] : [panes.after]);
  const controls = makeToolbar(toolbar, {
    fit: () => visible().forEach((pane) => pane.fit()),
    zoom: (times) => visible().forEach((pane) => pane.zoomBy(times)),
    depth: setDepth,
  });

  // ---- showing the state

  function scenes() {
    const i = chosenPass();
    if (isSplit()) return { before: beforeScene(i), after: afterScene(i) };
    return { after: chosenMode() === "diff" ? diffScene(i) : graphScene(i) };
  }

  /** Show the scenes of the state. @param {Item|Group|null} [anchor] what stays where it is */
  function showScenes(anchor = null) {
    const shown = scenes();
    sides.before.hidden = !shown.before;
    for (const name of ["before", "after"]) {
      if (!shown[name]) continue;
      panes[name].resize();
      panes[name].show(shown[name], anchor);
    }
    captions();
    showLegend(legend, shown.after);
    controls.show(shown.after);
  }

  function captions() {
    const i = chosenPass();
    const [before, after] = [i > 0 ? passes[i - 1].name : "", passes[i].name];
    panes.before.caption.textContent = before && !isPair ? `before · ${before}` : before;
    panes.after.caption.textContent = chosenMode() === "diff" && before ? `${before} → ${after}` : isPair ? after : `after · ${after}`;
  }

  function emphasize() {
    const i = chosenPass();
    const rewrite = state.rw === undefined ? null : passes[i].rewrites[Number(state.rw)];
    const names = rewrite ? namesOf(i, rewrite) : { before: [], after: [] };
    const near = new Set([...names.before, ...names.after]);
    for (const pane of visible()) {
      const scene = pane.picture().scene;
      Object.assign(pane.emphasis, {
        selected: state.node ?? "",
        near,
        kin: new Set(state.node && !scene.items.has(state.node) ? kinOf(scene, state.node) : EMPTY),
      });
      pane.draw();
    }
    return [...near];
  }

  /** Make some nodes seen: open the groups around them, and move there. */
  function lookAt(names) {
    let closed = false;
    for (const pane of visible())
      for (const name of names) {
        const item = pane.picture().scene.items.get(name);
        if (item && reveal(item)) closed = true;
      }
    if (closed) showScenes();
    for (const pane of visible()) {
      const known = names.filter((name) => pane.picture().scene.items.has(name));
      const wanted = known.length ? known : names.flatMap((name) => kinOf(pane.picture().scene, name));
      if (!wanted.every((name) => pane.canRead(name))) pane.focus(wanted);
    }
  }

  /** Move to what a pass changed, unless some of it can be read already. */
  function lookAtChanges() {
    for (const pane of visible()) {
      const changed = changedIn(pane.picture().scene);
      if (chosenMode() === "graph") flash(pane, changed);
      if (changed.length && !changed.some((name) => pane.canRead(name))) pane.focus(together(pane, changed));
    }
  }

  function follow(changed) {
    const chosen = state.node && !changed.node ? (panes.after.picture()?.scene.items.get(state.node) ?? null) : null;
    if (changed.pass || changed.mode) showScenes(chosen);
    const near = emphasize();
    if (changed.rw && near.length) lookAt(near);
    else if (changed.node && state.node && !state.node.startsWith("/")) lookAt([state.node]);
    else if (chosen)
      lookAt([state.node]); // a chosen node is followed through the passes
    else if (changed.pass || changed.mode) lookAtChanges();
    if (changed.pass) timeline.show();
    if (changed.pass || changed.rw) rewrites.show();
    if (changed.pass || changed.node || changed.mode) panel.show();
    warmUp();
  }

  function toggleGroup(group) {
    setOpen(group, !isOpen(group));
    showScenes(group);
    emphasize();
  }

  function setDepth(depth) {
    openToDepth(depth);
    go({ depth: Number.isFinite(depth) ? depth : "all" });
    showScenes();
    emphasize();
  }

  on("state", (changed) => {
    if (changed.mode || changed.rw) splitFor(changed);
    if (changed.pass || changed.mode || changed.node || changed.rw) follow(changed);
  });
  on("theme", () =>
    Object.values(panes).forEach((pane) => {
      pane.minimap.forget();
      pane.draw();
    }),
  );
  graphKeys({ visible, setDepth, isHere: () => !host.hidden });
  Object.assign(hooks, {
    panes,
    shown,
    /** Show pass `i`, by number or name. */
    step: (i) => go({ pass: typeof i === "number" ? passId(i) : i, rw: "" }),
    /** Resolves when what was asked for is painted. */
    painted: () => new Promise((done) => requestAnimationFrame(() => setTimeout(done))),
  });

  openToDepth(state.depth === "all" ? Infinity : state.depth !== undefined ? Number(state.depth) : startDepth());
  timeline.show();
  rewrites.show();
  panel.show();
  showScenes();
  visible().forEach((pane) => pane.home());
  follow({ node: Boolean(state.node), rw: state.rw !== undefined });
  if (!state.node && state.rw === undefined && chosenMode() !== "graph") lookAtChanges();
}

tabs.push({ id: "graph", title: "Graph", render: renderGraph });

/** A rewrite is shown where its nodes before can be seen: not in the graph alone. */
function splitFor(changed) {
  if (changed.rw && state.rw !== undefined && chosenMode() === "graph" && chosenPass() > 0) go({ mode: "diff" });
}

/** How deep groups are open at first: what fits, in the last graph and, more generously, in the largest. */
function startDepth() {
  const largest = d3.maxIndex(passes, (_, i) => graphOf(i).drawn.length);
  return Math.min(fittingDepth(graphScene(passes.length - 1)), fittingDepth(graphScene(largest), 2.5 * MOST_BOXES));
}

/** The nodes that differ from the pass before, as far as a scene has them. @param {Scene} scene */
function changedIn(scene) {
  const diff = scene.diff ?? diffOf(scene.graph.index);
  return diff ? diff.order.filter((node) => diff.mark.has(node.name) && scene.items.has(node.name)).map((node) => node.name) : [];
}

/** As many of the names, from the first on, as can be read together. */
function together(pane, names) {
  const { places, scene } = pane.picture();
  const { width, height } = pane.host.getBoundingClientRect();
  const taken = [];
  for (const name of names) {
    const around = boundsOf([...taken.slice(-1), places.get(shown(scene.items.get(name)))]);
    if (taken.length && (around.width > width / 0.6 || around.height > height / 0.6)) break;
    taken.push(around);
  }
  return names.slice(0, taken.length);
}

/** Ring what changed for a moment. */
function flash(pane, names) {
  const { emphasis } = pane;
  emphasis.flash = new Set(names.slice(0, 400));
  emphasis.glow = names.length ? 1 : 0;
  const begin = performance.now();
  const fade = (now) => {
    emphasis.glow = prefersStill.matches ? (now - begin < 1500 ? 1 : 0) : Math.max(0, 1 - (now - begin) / 1300);
    pane.draw();
    if (emphasis.glow > 0 && emphasis.begin === begin) requestAnimationFrame(fade);
  };
  emphasis.begin = begin;
  if (names.length) requestAnimationFrame(fade);
}

/** In idle moments, lay out what may be asked for next: the passes around the chosen one first. */
let warming = 0;
function warmUp() {
  const idle = window.requestIdleCallback ?? ((/** @type {any} */ work) => setTimeout(work, 30));
  const mine = ++warming;
  const i = chosenPass();
  const make = { graph: [graphScene], diff: [diffScene], side: [beforeScene, afterScene] }[chosenMode()];
  const near = d3.sort(d3.range(passes.length), (k) => Math.abs(k - i - 0.1)).slice(0, MOST_SCENES - 1); // those below first
  const scenes = near.flatMap((k) => make.map((scene) => () => scene(k)));
  if (chosenMode() === "graph") scenes.push(() => diffScene(i));
  const work = () => {
    if (mine !== warming || !scenes.length) return;
    arrange(scenes.shift()());
    idle(work);
  };
  setTimeout(() => idle(work), 150);
}
