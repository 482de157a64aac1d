"""What an answer says besides plain text: tool calls and reasoning, in the model's own forms.

`message` is the entrance: text in, deltas out. The forms are told from the chat template
(`formats`), read as they come (`hermes`, `mistral`, `bare`, on `reader` and `envelope`), and can be
prescribed to the model (`grammar`).
"""
