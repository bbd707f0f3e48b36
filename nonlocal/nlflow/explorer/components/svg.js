// How drawings are put together: an element with its attributes and its text, at the end of its parent.
const NS = "http://www.w3.org/2000/svg";

const node = (name, attributes, parent, text) => {
  const one = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
  if (text !== undefined) one.textContent = text;
  parent.append(one);
  return one;
};
