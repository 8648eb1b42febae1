/* The whole picture in a corner, with the part that is seen: click or drag to go there. Hidden where all is seen. */

const MINI = { width: 190, height: 130 };
const NO_EMPHASIS = { selected: "", near: new Set(), kin: new Set(), flash: new Set(), glow: 0, hover: null };

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
    paint(still.getContext("2d"), picture, { k: scale, x: 0, y: 0 }, { width, height, ratio }, NO_EMPHASIS);
  }

  return {
    forget: () => (still = null),
    draw(picture, view, size) {
      const whole = picture.width * view.k <= size.width + 1 && picture.height * view.k <= size.height + 1;
      canvas.style.visibility = whole ? "hidden" : "";
      if (whole) return;
      if (!still) redraw(picture);
      const ratio = devicePixelRatio || 1;
      context.setTransform(1, 0, 0, 1, 0, 0);
      context.drawImage(still, 0, 0);
      context.setTransform(scale * ratio, 0, 0, scale * ratio, 0, 0);
      context.strokeStyle = theme().accent;
      context.lineWidth = 2 / scale;
      context.strokeRect(-view.x / view.k, -view.y / view.k, size.width / view.k, size.height / view.k);
    },
  };
}
