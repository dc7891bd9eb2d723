import torch, sys, lightning as L
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification
class Lit(L.LightningModule):
    def __init__(self):
        super().__init__(); self.net = BertForSequenceClassification(BertConfig())
    def training_step(self, batch, i):
        loss = self.net(input_ids=batch[0], labels=batch[1]).loss; self.log("loss", loss); return loss
    def validation_step(self, batch, i):
        out = self.net(input_ids=batch[0]).logits; self.log("acc", (out.argmax(-1) == batch[1]).float().mean())
    def configure_optimizers(self): return torch.optim.AdamW(self.parameters(), 1e-5)
x, y = torch.randint(0, 30000, (80, 128)), torch.randint(0, 2, (80,))
L.Trainer(max_epochs=1, accelerator="auto", devices=1, precision=sys.argv[1] if len(sys.argv) > 1 else "32-true", enable_progress_bar=False, gradient_clip_val=1.0, logger=False, enable_checkpointing=False).fit(Lit(), DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True), DataLoader(TensorDataset(x, y), batch_size=40))
