/* A canvas that shows a scene: it can be moved and zoomed, boxes can be pointed at and chosen, groups opened. */

const ZOOM = { least: 0.01, most: 3, read: 0.85 };

/** @param {HTMLElement} host @param {string} label  what it is for who cannot see it
 * @param {{choose(name: string): void, toggle(group: Group): void, moved?(pane: any): void}} does */
function makePane(host, label, does) {
  const canvas = el("canvas.graph", { tabindex: 0, role: "img", "aria-label": label });
  host.append(canvas);
  const context = canvas.getContext("2d", { alpha: false });
  const size = { width: 1, height: 1, ratio: 1 };
  const emphasis = { ...NO_EMPHASIS };
  /** @type {Picture|null} */
  let picture = null;
  let view = d3.zoomIdentity;
  let waiting = 0;
  const pane = { host, canvas, emphasis, minimap: makeMinimap(host, (x, y) => pane.center(x, y, 0)) };

  const zoom = d3
    .zoom()
    .scaleExtent([ZOOM.least, ZOOM.most])
    .filter((event) => !event.button && event.type !== "dblclick")
    .wheelDelta((event) => -event.deltaY * (event.deltaMode === 1 ? 0.05 : event.deltaMode ? 1 : 0.002) * (event.ctrlKey ? 6 : 1))
    .on("zoom", (event) => {
      view = event.transform;
      pane.draw();
      if (event.sourceEvent) does.moved?.(pane);
    });
  const stage = d3.select(canvas).call(zoom);

  pane.view = () => view;
  pane.picture = () => picture;

  pane.draw = () => {
    waiting ||= requestAnimationFrame(() => {
      waiting = 0;
      if (picture?.version !== opened.version) return; // out of view since groups were opened or closed
      paint(context, picture, view, size, emphasis);
      pane.minimap.draw(picture, view, size);
    });
  };

  /** Show a scene. What is at a place of the screen stays there: `anchor`, else what is in the middle.
   * @param {Scene} scene @param {Item|Group|null} [anchor] */
  pane.show = (scene, anchor = null) => {
    const held = picture && hold(anchor);
    picture = arrange(scene);
    emphasis.hover = null;
    pane.minimap.forget();
    if (held) restore(held);
    canvas.setAttribute("aria-label", `${label}: ${describe(scene)}`);
    pane.draw();
  };

  const middle = () => boxAt(picture, (size.width / 2 - view.x) / view.k, (size.height / 2 - view.y) / view.k, true);

  /** The middle of a box or frame: a group that is clicked there stays under the pointer when its width changes. */
  const head = (placed) => placed.x + placed.width / 2;

  /** Something that another picture is likely to have too, and where it is on the screen. */
  function hold(anchor) {
    const placed = anchor ? picture.places.get(isGroupOf(anchor) ? anchor : shown(anchor)) : middle();
    if (!placed) return null;
    return { of: anchor ?? placed.of ?? placed.group, x: head(placed) * view.k + view.x, y: placed.y * view.k + view.y };
  }

  function restore({ of, x, y }, k = view.k) {
    const scene = picture.scene;
    const now = isGroupOf(of) ? scene.groups.get(of.key) : (scene.items.get(of.name) ?? scene.items.get(kinOf(scene, of.name)[0]));
    const placed = now && picture.places.get(isGroupOf(now) ? now : shown(now));
    if (placed) stage.call(zoom.transform, d3.zoomIdentity.translate(x - head(placed) * k, y - placed.y * k).scale(k));
  }

  /** Show the same part as another pane does. */
  pane.follow = (other) => {
    const held = picture && other.held();
    if (held) restore(held, other.view().k);
  };
  pane.held = () => picture && hold(null);

  /** Move and zoom so that a part of the picture fills the pane. @param {{x, y, width, height}} part */
  pane.moveTo = (part, most = ZOOM.read, ms = 380, least = ZOOM.least) => {
    const [margin, caption] = [36, 20]; // below the caption, which stands in the upper left
    const k = Math.max(least, Math.min(most, (size.width - margin) / part.width, (size.height - margin - caption) / part.height));
    const to = d3.zoomIdentity
      .translate(size.width / 2, (size.height + caption) / 2)
      .scale(k)
      .translate(-(part.x + part.width / 2), -(part.y + part.height / 2));
    const time = motion(ms);
    stage.interrupt();
    if (time && picture) stage.transition().duration(time).ease(d3.easeCubicInOut).call(zoom.transform, to);
    else stage.call(zoom.transform, to);
  };

  pane.center = (x, y, ms = 250) => pane.moveTo({ x: x - 1, y: y - 1, width: 2, height: 2 }, view.k, ms);

  pane.fit = (ms = 380) => picture && pane.moveTo({ x: 0, y: 0, width: picture.width, height: picture.height }, 1.2, ms);

  /** Fit, if things can be told apart then; else the beginning. */
  pane.home = () => {
    if (!picture) return;
    const k = Math.min(size.width / picture.width, size.height / picture.height);
    if (k >= 0.3) return pane.fit(0);
    const [width, height] = [size.width / 0.6, size.height / 0.6];
    const first = picture.root.boxes[0] ?? picture.root.frames[0];
    pane.moveTo({ x: Math.max(0, Math.min(first.x - width / 4, picture.width - width)), y: first.y - 30, width, height }, 1, 0);
  };

  /** The box that a node is in, if it is in the picture. */
  const placeOf = (name) => {
    const item = picture.scene.items.get(name);
    return item && picture.places.get(shown(item));
  };

  /** Move to boxes by name, close enough to read them, or to see them all. Whether there was one. */
  pane.focus = (names, ms = 380) => {
    if (!picture) return false;
    const placed = names.map(placeOf).filter(Boolean);
    if (!placed.length) return false;
    const { x, y, width, height } = boundsOf(placed);
    const part = { x: x - 60, y: y - 60, width: width + 120, height: height + 120 };
    pane.moveTo(part, Math.min(1.1, Math.max(view.k, ZOOM.read)), ms, 0.35);
    return true;
  };

  pane.zoomBy = (times) => stage.transition().duration(motion(180)).call(zoom.scaleBy, times);

  /** Whether all of a box can be seen and read. */
  pane.canRead = (name) => {
    const placed = picture && placeOf(name);
    if (!placed || view.k < 0.45) return false;
    const [left, top] = [placed.x * view.k + view.x, placed.y * view.k + view.y];
    return left >= 0 && top >= 0 && left + placed.width * view.k <= size.width && top + placed.height * view.k <= size.height;
  };

  // ---- pointing and choosing

  const at = (event) => {
    const { left, top } = canvas.getBoundingClientRect();
    return picture ? boxAt(picture, (event.clientX - left - view.x) / view.k, (event.clientY - top - view.y) / view.k) : null;
  };
  const groupOf = (found) => found && (found.group ?? (isGroupOf(found.of) ? found.of : null));

  canvas.addEventListener("click", (event) => {
    const found = at(event);
    const group = groupOf(found);
    if (group && found.onToggle) does.toggle(group);
    else does.choose(!found ? "" : group ? (group.item?.name ?? `/${group.key}`) : found.node.name);
  });
  canvas.addEventListener("dblclick", (event) => {
    const found = at(event);
    const group = groupOf(found);
    if (group && !found.onToggle) does.toggle(group);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (event.buttons) return;
    const found = at(event);
    const placed = found?.placed ?? null;
    canvas.style.cursor = found && (!found.group || found.onToggle) ? "pointer" : "grab";
    if (placed !== emphasis.hover) {
      emphasis.hover = placed;
      pane.draw();
    }
    canvas.title = !found || found.group ? "" : found.node ? nodeTip(found.node) : found.of.item ? nodeTip(found.of.item.node) : groupTip(found.of);
  });
  canvas.addEventListener("pointerleave", () => {
    emphasis.hover = null;
    pane.draw();
  });

  const resize = (pane.resize = () => {
    const { width, height } = host.getBoundingClientRect();
    if (!width || !height || (width === size.width && height === size.height && size.ratio === devicePixelRatio)) return;
    Object.assign(size, { width, height, ratio: devicePixelRatio || 1 });
    canvas.width = Math.round(width * size.ratio);
    canvas.height = Math.round(height * size.ratio);
    pane.draw();
  });
  new ResizeObserver(resize).observe(host);
  resize();
  return pane;
}

/** What is at a point of the picture: a box with its node, a collapsed group, or the head of an open one (`group`);
 * `onToggle`: on its + or −. `near`: also what is close. */
function boxAt(picture, x, y, near = false) {
  const within = (p) => inside(p, x, y);
  let frame = picture.root;
  for (;;) {
    const box = frame.boxes.find(within);
    if (box && isGroupOf(box.of)) return { ...box, placed: box, onToggle: inside(toggleOf(box), x, y) };
    if (box) return { ...box, placed: box, node: memberAt(box.of, y - box.y) };
    const inner = frame.frames.find(within);
    if (!inner) break;
    frame = inner;
  }
  if (near) return nearest(frame, x, y);
  if (frame.group.parent && y < frame.y + FRAME.head) return { ...frame, placed: frame, onToggle: inside(toggleOf(frame), x, y) };
  return null;
}

/** What is around some boxes. */
function boundsOf(placed) {
  const [x, y] = [d3.min(placed, (p) => p.x), d3.min(placed, (p) => p.y)];
  return { x, y, width: d3.max(placed, (p) => p.x + p.width) - x, height: d3.max(placed, (p) => p.y + p.height) - y };
}

const inside = (p, x, y) => x >= p.x && x <= p.x + p.width && y >= p.y && y <= p.y + p.height;

function nearest(frame, x, y) {
  const distance = (p) => Math.hypot(p.x + p.width / 2 - x, p.y + p.height / 2 - y);
  return d3.least([...frame.boxes, ...frame.frames], distance) ?? null;
}

/** Who has to do with a node that a scene does not have: what it became, or what became it. */
function kinOf(scene, name) {
  if (!scene.diff) return EMPTY;
  const heirs = scene.diff.became.get(name);
  if (heirs) return heirs;
  return [...scene.diff.became].filter(([, names]) => names.includes(name)).map(([old]) => old);
}

/** A scene in a sentence. @param {Scene} scene */
function describe(scene) {
  const kinds = countsOf(scene.root.kinds);
  const changes = scene.diff ? `; ${marksOf(scene.root.marks) || "nothing changed"}` : "";
  return `${scene.graph.name}, ${scene.root.count} nodes, ${kinds}${changes}`;
}

/** What is said about a group that is pointed at. @param {Group} group */
const groupTip = (group) =>
  [group.title, `${group.count} nodes: ${countsOf(group.kinds)}`, marksOf(group.marks)].filter(Boolean).join("\n");

/** What is said about a node that is pointed at. @param {NodeRecord} node */
function nodeTip(node) {
  const facts = [
    node.path && `module: ${node.path}`,
    node.source && `source: ${node.source}`,
    node.made_by && `made by: ${node.made_by}`,
    node.reason && `float: ${node.reason}`,
    node.note,
  ];
  return [node.text || node.name, ...facts.filter(Boolean)].join("\n");
}
