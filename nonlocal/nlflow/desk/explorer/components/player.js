// Time: moments that were computed before, shown one after the other. Other parts of the page hear of each as the event
// "nl-moment" of the document, which keeps the last as `nlMoment`: pictures and lines that run draw it themselves.
const WHOLE = 8000, SLOW = 1000, STRIDE = 10;
// Milliseconds from the first moment to the last; with reduced motion those of a picture, and how many moments it is on.
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export function render({ model }) {
  const root = document.createElement("div");
  root.className = "nl-player";
  root.innerHTML = `<button class="play">Play</button><button class="restart">Restart</button>
    <button class="back" aria-label="one moment back">‹</button><button class="on" aria-label="one moment on">›</button>
    <input type="range" min="0" value="0" aria-label="time shown"><output></output>`;
  const find = (selector) => root.querySelector(selector);
  const play = find(".play"), range = find("input"), told = find("output");
  let at = model.shown.moment, running = 0;

  const last = () => model.shown.times.length - 1;
  // The numbers of a field at the moment, as they are drawn: grey levels of pixels, or values of a line.
  const values = (field) => {
    const { size, pixels } = model.shown, Kind = pixels ? Uint8Array : Float32Array;
    const each = size * Kind.BYTES_PER_ELEMENT, start = (field * (last() + 1) + at) * each;
    return new Kind(model.frames.slice(start, start + each));
  };
  const show = () => {
    const { size, fields, pixels, times } = model.shown;
    const there = times.length && model.frames?.byteLength === fields * times.length * size * (pixels ? 1 : 4);
    for (const one of root.querySelectorAll("button, input")) one.disabled = !there;
    if (!there) { told.textContent = times.length ? "" : "computing"; return; }
    at = Math.min(at, last());
    Object.assign(range, { max: last(), value: at });
    told.textContent = `t = ${Number(times[at].toPrecision(4))}`;
    range.setAttribute("aria-valuetext", told.textContent);
    document.nlMoment = { t: times[at], values };
    document.dispatchEvent(new CustomEvent("nl-moment", { detail: document.nlMoment }));
  };
  const stop = () => {
    cancelAnimationFrame(running);
    running = 0;
    play.textContent = "Play";
  };
  const rest = () => { stop(); show(); model.send_msg({ moment: at }); };
  const go = () => {
    if (at >= last()) at = 0;
    play.textContent = "Pause";
    const from = at, begun = performance.now();
    const tick = (now) => {
      const passed = Math.max(now - begun, 0);
      const on = calm.matches ? STRIDE * Math.floor(passed / SLOW) : Math.floor((passed * last()) / WHOLE);
      const next = Math.min(from + on, last());
      if (next !== at || on === 0) { at = next; show(); }
      if (at < last()) running = requestAnimationFrame(tick); else rest();
    };
    running = requestAnimationFrame(tick);
  };
  const step = (moments) => { at = Math.min(Math.max(at + moments, 0), last()); rest(); };
  play.addEventListener("click", () => (running ? rest() : go()));
  find(".restart").addEventListener("click", () => { stop(); at = 0; go(); });
  find(".back").addEventListener("click", () => step(-1));
  find(".on").addEventListener("click", () => step(1));
  range.addEventListener("input", () => { stop(); at = Number(range.value); show(); });
  range.addEventListener("change", rest);
  let serial = model.shown.serial;
  model.on(["shown", "frames"], () => {
    if (model.shown.serial !== serial) { serial = model.shown.serial; stop(); at = model.shown.moment; }
    show();
  });
  show();
  return root;
}
