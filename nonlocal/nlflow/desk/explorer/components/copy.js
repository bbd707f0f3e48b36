// Copy a text, and say so; where the browser refuses, say what else can be done.
const copied = async (text, said, words, refused) => {
  try {
    await navigator.clipboard.writeText(text);
    said.textContent = words;
  } catch {
    said.textContent = refused;
    return false;
  }
  return true;
};
