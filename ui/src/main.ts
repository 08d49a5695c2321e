import "./styles/tokens.css";
import "./styles/base.css";
import "./styles/parts.css";
import "uplot/dist/uPlot.min.css";
import { mount } from "svelte";
import App from "./App.svelte";
import { server } from "./state/server.svelte";
import { settings } from "./state/settings.svelte";

settings.apply();
void server.stay();

const target = document.getElementById("app");
if (target) mount(App, { target });
