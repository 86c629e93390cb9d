import { render } from "preact";
import { App } from "./App";
import "./style/base.css";
import "./style/chat.css";
import "./style/engine.css";
import "./shared/theme";

const root = document.getElementById("app")!;
root.textContent = "";
render(<App />, root);
