// The bar of tabs: buttons that arrow keys go through, as the pattern for tabs of the ARIA practices has it.
// The address of the page holds what its controls say; whoever opens it, or writes another one, gets that.
// And a notice when the server has gone: nothing on the page answers then.
const GONE = "The server has gone: nothing on this page is computed any more. Start `nonlocal explore` again where it ran, \
then reload this page.";

const watch = (page) => page.on_event("connection_lost", () => {
  if (document.querySelector(".nl-gone")) return;
  const notice = document.createElement("div");
  notice.className = "nl-gone";
  notice.setAttribute("role", "alert");
  notice.style.cssText = "position:fixed; inset:0 0 auto 0; z-index:9; padding:12px 20px; background:#a3160b; color:#fff; \
    font:600 15px/1.45 system-ui, sans-serif";
  notice.textContent = GONE;
  document.body.append(notice);
});

// Light or dark as the browser wishes, or as was chosen on this machine.
const theme = (chosen) => {
  const apply = () => { document.documentElement.dataset.theme = chosen.value; };
  try { chosen.value = localStorage.getItem("nlflow-colours") ?? ""; } catch { /* the browser keeps nothing */ }
  chosen.addEventListener("change", () => {
    apply();
    try { localStorage.setItem("nlflow-colours", chosen.value); } catch { /* it is kept for this page alone */ }
  });
  apply();
};

const SETTLED = 300;  // milliseconds after the last change; browsers refuse an address that changes too often

export function render({ model, view }) {
  watch(view.model.document);
  const bar = document.createElement("div");
  bar.className = "bar";
  bar.innerHTML = `<div class="tabs" role="tablist"></div><div class="own"><span class="said" role="status"></span>
    <button class="copy" title="opens this page with the same settings, from the same server">Copy address</button>
    <select aria-label="colours"><option value="">system colours</option><option>light</option><option>dark</option></select></div>`;
  theme(bar.querySelector("select"));
  const root = bar.querySelector(".tabs"), said = bar.querySelector(".said");
  const buttons = model.shown.names.map((name, number) => {
    const button = document.createElement("button");
    button.textContent = name;
    button.setAttribute("role", "tab");
    button.addEventListener("click", () => choose(number));
    root.append(button);
    return button;
  });
  const mark = (number) => buttons.forEach((button, k) => {
    button.setAttribute("aria-selected", String(k === number));
    button.tabIndex = k === number ? 0 : -1;
  });
  const choose = (number) => {
    mark(number);
    model.send_msg(number);
  };
  root.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    const next = (buttons.findIndex((button) => button.tabIndex === 0) + move + buttons.length) % buttons.length;
    buttons[next].focus();
    choose(next);
  });
  let due = 0;
  const write = () => {
    clearTimeout(due);
    due = 0;
    if (model.shown.address && location.hash !== `#${model.shown.address}`)
      history.replaceState(null, "", `#${model.shown.address}`);
  };
  const arrive = () => {
    clearTimeout(due);
    model.send_msg({ address: location.hash });
  };
  bar.querySelector(".copy").addEventListener("click", () => {
    write();
    copied(location.href, said, "address copied", "the browser refuses to copy: take it from its address bar");
  });
  model.on("shown", () => {
    mark(model.shown.chosen);
    said.textContent = "";
    clearTimeout(due);
    due = setTimeout(write, SETTLED);
  });
  addEventListener("hashchange", arrive);
  mark(model.shown.chosen);
  arrive();
  return bar;
}
