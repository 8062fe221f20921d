// Theme switch: the page's colours follow data-theme, figures are drawn again by the server.
// Number fields of the step control take effect when they lose the focus; Enter should do as much.
document.addEventListener("keydown", function (event) {
  if (event.key === "Enter" && event.target.matches(".dash-range-slider-input")) {
    event.target.blur();
  }
});
window.dash_clientside = Object.assign({}, window.dash_clientside, {
  odc: {
    theme: function (clicks) {
      const root = document.documentElement;
      if (clicks) {
        root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
        localStorage.setItem("odc-theme", root.dataset.theme);
      }
      return root.dataset.theme || "light";
    },
  },
});
