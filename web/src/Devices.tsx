import { useFrames } from "./hooks";
import type { Live } from "./live";
import type { Device } from "./state";
import { bytes, cardText, devicesText } from "./words";

const HUES = ["#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#0072B2", "#D55E00", "#F0C419"];

/** Which weights each device has, and the memory that they take. Devices that are alike share a row. */
export function Devices({ live }: { live: Live }) {
  useFrames(live);
  const models = [...new Set(live.devices.flatMap((device) => device.components.flatMap((one) => one.models)))].sort();
  const hue = (model: string): string => HUES[models.indexOf(model) % HUES.length]!;
  const most = Math.max(1, ...live.devices.map((device) => device.weights_bytes ?? taken(device)));
  return (
    <section class="card table" aria-label="Models on devices">
      <div class="bar">
        <h2>Models on devices</h2>
        <span class="legend">
          {models.map((model) => (
            <span key={model}>
              <i class="swatch" style={{ background: hue(model) }} />
              {model}
            </span>
          ))}
        </span>
      </div>
      <table class="devices">
        <thead>
          <tr>
            <th>device</th>
            <th>weights</th>
            <th>free</th>
            <th class="wide-only">in use</th>
          </tr>
        </thead>
        <tbody>
          {alike(live.devices).map((group) => (
            <Row key={group[0]!.device} group={group} hue={hue} most={most} />
          ))}
        </tbody>
      </table>
    </section>
  );
}

function Row({ group, hue, most }: { group: Device[]; hue: (model: string) => string; most: number }) {
  const device = group[0]!;
  const nodes = [...new Set(group.map((one) => one.node))];
  const size = device.weights_bytes ?? taken(device);
  return (
    <tr>
      <td>
        {device.kind === "cpu" ? `CPU slots ${group.map((one) => one.device).join(", ")}` : devicesText(group.map((one) => one.device))}
        <div class="soft">node {nodes.join(", ")}</div>
      </td>
      <td class="held">
        {device.kind === "cpu" ? (
          <span class="soft">runs stages without an accelerator</span>
        ) : (
          <>
            <span class="meter" style={{ width: `${(100 * size) / most}%` }}>
              {device.components.map((one) => (
                <i
                  key={`${one.models}/${one.name}`}
                  title={`${one.models.join(", ")}: ${one.name}, ${bytes(one.bytes)}`}
                  style={{ width: `${(100 * one.bytes) / Math.max(1, size)}%`, background: hue(one.models[0]!) }}
                />
              ))}
            </span>
            <span class="names">
              {device.components.map((one) => (
                <span key={`${one.models}/${one.name}`}>
                  {one.models.join(", ")} {one.name} <span class="soft">{bytes(one.bytes)}</span>
                </span>
              ))}
              {!device.components.length && <span class="soft">nothing that has a known size</span>}
            </span>
          </>
        )}
      </td>
      <td>
        {device.kind === "cpu" ? "–" : device.weights_bytes === null ? "no limit" : bytes(device.weights_free_bytes ?? 0)}
      </td>
      <td class="wide-only">
        {device.used_bytes === null ? "–" : bytes(device.used_bytes)}
        {group.flatMap((one) =>
          one.cards.map((card, place) => (
            <div class="soft" key={`${one.device}.${place}`}>
              {group.length > 1 && `${one.device}: `}
              {cardText(card)}
            </div>
          )),
        )}
      </td>
    </tr>
  );
}

/** What its weights take. */
const taken = (device: Device): number => device.components.reduce((sum, one) => sum + one.bytes, 0);

function alike(devices: readonly Device[]): Device[][] {
  const groups = new Map<string, Device[]>();
  for (const device of devices) {
    const key = JSON.stringify([device.kind, device.weights_bytes, device.components, device.used_bytes]);
    groups.set(key, [...(groups.get(key) ?? []), device]);
  }
  return [...groups.values()];
}
