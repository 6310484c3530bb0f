import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { Devices } from "./Devices";
import { OnTime } from "./OnTime";
import { Plan } from "./Plan";
import { Playground } from "./Playground";
import { Queue } from "./Queue";
import { RequestCard } from "./RequestCard";
import { Timeline } from "./Timeline";
import { onKeyWanted, setKey } from "./api";
import { useFrames } from "./hooks";
import { Live } from "./live";
import { percent } from "./words";
import "./style.css";

const VIEWS = [
  ["make", "Playground"],
  ["live", "Live"],
  ["ontime", "On time"],
  ["devices", "Devices"],
  ["plan", "Plan"],
] as const;
type View = (typeof VIEWS)[number][0];

const viewNow = (): View => VIEWS.find(([name]) => location.hash === `#${name}`)?.[0] ?? "make";

function Page({ live }: { live: Live }) {
  const [view, setView] = useState<View>(viewNow);
  const [chosen, choose] = useState<number | null>(null);
  useEffect(() => {
    const changed = (): void => setView(viewNow());
    const keys = (event: KeyboardEvent): void => {
      const field = (event.target as Element).closest<HTMLElement>("input, textarea, select, dialog");
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (field) {
        if (event.key === "Escape") field.blur(); // So that the keys below are no text. A dialog closes itself.
        return;
      }
      const place = Number(event.key) - 1;
      if (VIEWS[place]) location.hash = VIEWS[place][0];
      if (event.key === "/") {
        event.preventDefault();
        document.querySelector<HTMLElement>("[name=prompt]")?.focus();
      }
    };
    addEventListener("hashchange", changed);
    addEventListener("keydown", keys);
    return () => {
      removeEventListener("hashchange", changed);
      removeEventListener("keydown", keys);
    };
  }, []);
  return (
    <>
      <header>
        <h1>Tilework</h1>
        <nav aria-label="Views">
          {VIEWS.map(([name, title], place) => (
            <a key={name} href={`#${name}`} aria-current={view === name ? "page" : undefined} title={`Key ${place + 1}`}>
              {title}
            </a>
          ))}
          <a href="/docs">API</a>
        </nav>
        <Summary live={live} />
      </header>
      <main>
        <div hidden={view !== "make"}>
          <Playground />
        </div>
        {view === "live" && (
          <div class={`board ${chosen === null ? "" : "with-request"}`}>
            <div>
              <Timeline live={live} chosen={chosen} choose={choose} />
              <Queue live={live} chosen={chosen} choose={choose} />
            </div>
            {chosen !== null && <RequestCard live={live} number={chosen} close={() => choose(null)} />}
          </div>
        )}
        {view === "ontime" && <OnTime live={live} />}
        {view === "devices" && <Devices live={live} />}
        <div hidden={view !== "plan"}>
          <Plan />
        </div>
      </main>
      <KeyDialog />
    </>
  );
}

/** The server in one line. */
function Summary({ live }: { live: Live }) {
  useFrames(live);
  const { state } = live;
  if (live.trouble || !state) {
    return (
      <p class="summary soft" role="status">
        {live.trouble || "Connecting …"}
      </p>
    );
  }
  const classes = state.attainment.filter((one) => one.by === "class");
  const met = classes.reduce((sum, one) => sum + one.recent_on_time, 0);
  const total = met + classes.reduce((sum, one) => sum + one.recent_late, 0);
  const accelerators = live.devices.filter((device) => device.kind === "accelerator");
  const busy = new Set(state.planned.filter((tile) => tile.start_s <= state.now_s).flatMap((tile) => tile.devices));
  const numBusy = accelerators.filter((device) => busy.has(device.device)).length;
  return (
    <p class="summary soft num" role="status">
      <span>
        {numBusy} of {accelerators.length} device{accelerators.length === 1 ? "" : "s"} busy
      </span>
      <span>{state.num_open} open</span>
      {total > 0 && <span>{percent(met / total)} on time</span>}
      <span>{state.policy}</span>
    </p>
  );
}

/** Asks for the API key, if the server wants one. */
function KeyDialog() {
  const dialog = useRef<HTMLDialogElement>(null);
  const [isWrong, setWrong] = useState(false);
  useEffect(() => {
    onKeyWanted((wrong) => {
      setWrong(wrong);
      if (!dialog.current!.open) dialog.current!.showModal();
    });
  }, []);
  const submit = (event: Event): void => {
    event.preventDefault();
    const key = String(new FormData(event.target as HTMLFormElement).get("key")).trim();
    if (!key) return;
    dialog.current!.close();
    setKey(key);
  };
  return (
    <dialog ref={dialog} class="card pad" aria-label="API key">
      <form onSubmit={submit}>
        <label>
          API key of this server
          <input name="key" type="password" autocomplete="off" autofocus required />
        </label>
        <p class={isWrong ? "bad" : "soft"}>{isWrong ? "The server does not know this key." : "It is kept in this tab only."}</p>
        <button class="primary">Use it</button>
      </form>
    </dialog>
  );
}

const live = new Live();
render(<Page live={live} />, document.getElementById("page")!);
void live.follow();
