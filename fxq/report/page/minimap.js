/* The whole picture in a corner, with the part that is seen: click or drag to go there. Hidden where all is seen. */

const MINI = { width: 190, height: 130, margin: 12 };

/** @param {HTMLElement} host @param {(x: number, y: number) => void} goTo */
function makeMinimap(host, goTo) {
  const canvas = el("canvas.minimap", { "aria-hidden": "true" });
  host.append(canvas);
  const context = canvas.getContext("2d");
  let still = null; // the picture without the window, drawn once
  let scale = 1;

  const drag = (event) => {
    if (event.type === "pointermove" && !event.buttons) return;
    event.preventDefault();
    goTo(event.offsetX / scale, event.offsetY / scale);
  };
  canvas.addEventListener("pointerdown", drag);
  canvas.addEventListener("pointermove", drag);

  /** @param {Picture} picture */
  function redraw(picture) {
    const ratio = devicePixelRatio || 1;
    scale = Math.min(MINI.width / picture.width, MINI.height / picture.height);
    const [width, height] = [Math.max(12, picture.width * scale), Math.max(12, picture.height * scale)];
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    still = new OffscreenCanvas(canvas.width, canvas.height);
    const pen = still.getContext("2d");
    pen.scale(scale * ratio, scale * ratio);
    drawFrame(pen, picture.root, picture.scene.diff !== null, scale);
  }

  return {
    forget: () => (still = null),
    draw(picture, view, size) {
      const whole = picture.width * view.k <= size.width + 1 && picture.height * view.k <= size.height + 1;
      canvas.style.visibility = whole ? "hidden" : "";
      if (whole) return;
      if (!still) redraw(picture);
      const ratio = devicePixelRatio || 1;
      const colours = theme();
      context.setTransform(1, 0, 0, 1, 0, 0);
      context.fillStyle = colours.paper;
      context.fillRect(0, 0, canvas.width, canvas.height);
      context.drawImage(still, 0, 0);
      context.setTransform(scale * ratio, 0, 0, scale * ratio, 0, 0);
      context.strokeStyle = colours.accent;
      context.lineWidth = 2 / scale;
      context.strokeRect(-view.x / view.k, -view.y / view.k, size.width / view.k, size.height / view.k);
    },
  };
}

/** @param {Frame} frame */
function drawFrame(pen, frame, isDiff, scale) {
  const least = 1.5 / scale; // a box is at least a dot
  if (frame.group.parent) {
    pen.globalAlpha = 1;
    pen.fillStyle = theme().frames[1];
    pen.fillRect(frame.x, frame.y, frame.width, frame.height);
  }
  for (const { of, x, y, width, height } of frame.boxes) {
    const isGroup = isGroupOf(of);
    const mark = isGroup ? Object.keys(of.marks).find((name) => of.marks[name]) : of.mark;
    pen.globalAlpha = isDiff && !mark ? 0.25 : 1;
    if (isDiff && mark) pen.fillStyle = data.changes[mark].colour;
    else pen.fillStyle = isGroup ? theme().group : data.looks[of.node.kind].colour;
    pen.fillRect(x, y, Math.max(width, least), Math.max(height, least));
  }
  for (const inner of frame.frames) drawFrame(pen, inner, isDiff, scale);
}
