from lamplighter.tasks import collection

ns = collection(__file__)
