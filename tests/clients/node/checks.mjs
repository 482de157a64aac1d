// What the scripts of this folder share.
export const BASE = `${process.env.KVRELAY_URL}/v1`;
export const KEY = process.env.KVRELAY_KEY;
export const MODEL = process.env.KVRELAY_MODEL;
export const CAPITAL = "What is the capital of France?";

/** One line for each check, by its function's name, with what it gives; ends the process. */
export async function run(...checks) {
  let failed = 0;
  for (const check of checks) {
    const begun = performance.now();
    let outcome = "ok";
    let detail = "";
    try {
      detail = (await check()) ?? "";
    } catch (error) {
      console.error(error);
      outcome = "FAIL";
      failed += 1;
    }
    const seconds = ((performance.now() - begun) / 1000).toFixed(1);
    const name = check.name.replaceAll("_", " ");
    console.log(`${outcome.padEnd(4)}  ${name}  (${seconds} s)  ${detail}`.trimEnd());
  }
  process.exit(failed ? 1 : 0);
}
