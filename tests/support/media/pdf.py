"""Write small PDF documents."""

from __future__ import annotations

from collections.abc import Sequence


def write_pdf(pages: Sequence[str], num_copies: int = 1) -> bytes:
    """Return a PDF document with a line of text on each page. The list of pages has each page `num_copies` times."""
    kids = " ".join(f"{3 + 2 * i} 0 R" for i in range(len(pages)) for _ in range(num_copies))
    font = "<< /Font << /F << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >>"
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages) * num_copies} >>",
    ]
    for i, text in enumerate(pages):
        content = f"BT /F 12 Tf 10 100 Td ({text}) Tj ET" if text else ""
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 500 200] /Resources {font} "
            f"/Contents {4 + 2 * i} 0 R >>",
            f"<< /Length {len(content)} >>\nstream\n{content}\nendstream",
        ]
    data, starts = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        starts.append(len(data))
        data += f"{number} 0 obj\n{body}\nendobj\n".encode()
    entries = "".join(f"{start:010} 00000 n \n" for start in starts)
    table = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{entries}"
    end = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(data)}\n%%EOF\n"
    return data + table.encode() + end.encode()
