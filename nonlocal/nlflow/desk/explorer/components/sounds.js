// Sounds below each other: files that the browser plays, from the memory of this page.
export function render({ model }) {
  const root = document.createElement("div");
  root.className = "nl-sounds";
  let addresses = [];
  const show = () => {
    addresses.forEach(URL.revokeObjectURL);
    addresses = [];
    root.replaceChildren(...model.shown.names.map((name, k) => {
      const label = document.createElement("label"), audio = document.createElement("audio");
      const [start, end] = model.shown.places[k];
      addresses.push(URL.createObjectURL(new Blob([model.files.slice(start, end)], { type: "audio/wav" })));
      Object.assign(audio, { controls: true, preload: "metadata", src: addresses[k] });
      audio.setAttribute("aria-label", name);
      // One is heard at a time.
      audio.addEventListener("play", () => root.querySelectorAll("audio").forEach((one) => one === audio || one.pause()));
      label.append(name, audio);
      return label;
    }));
  };
  model.on("shown", show);
  show();
  return root;
}
