catch (error) {
  // the verdict and the table below are there without any script
  document.documentElement.classList.remove("js");
  document.getElementById("explorer").hidden = true;
  const said = document.getElementById("failed");
  said.textContent = `The interactive part of this page failed (${error}); the calls are below.`;
  said.hidden = false;
  throw error;
}
